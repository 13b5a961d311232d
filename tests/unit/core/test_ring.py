"""The ring buffer of a rank's records."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from ringdance.core import ring as ring_module
from ringdance.core.monitor.processes import open_ring
from ringdance.core.recorder import Recorder, StepMark
from ringdance.core.ring import Kind, Ring, RingReader, Who, Word, records, shared_memory
from ringdance.training import session
from ringdance.training.basics import mark_step

CAPACITY = ring_module._CAPACITY


def test_what_is_written_is_read_in_order() -> None:
    ring = Ring()
    ring.describe(3, 8, "node7")
    reader = RingReader(ring.memory)
    assert reader.who == Who(3, "node7", os.getpid())
    for name in ("gradients." * 300, "loss"):
        ring.pending_name(name)
        assert reader.pending_name == name[:2047]
    ring.add(Kind.SUBMIT, ring.label("a"), 2, 5, 1 << 33, -1)
    ring.add(Kind.BATCH, ring.label(("b", "a", "c")), 0, 7, when=11)
    first, second = reader.read()
    assert (first.kind, reader.name(first.label), first.set_id) == (Kind.SUBMIT, "a", 2)
    assert first.values == (5, 0, 0xFFFFFFFF, 0, 0)
    assert (second.time, reader.name(second.label), second.values[0]) == (11, ("b", "a", "c"), 7)
    assert first.time > second.time
    assert list(reader.read()) == []
    assert [record.time for record in reader.last(1)] == [11]
    assert list(reader.last(5)) == [first, second]


def test_what_a_killed_thread_has_begun_hides_nothing() -> None:
    """A record that a killed thread did not complete, or an older count of records, hides no other record."""
    ring = Ring()
    reader = RingReader(ring.memory)
    ring.add(Kind.STEP, a=1)
    next(ring.numbers)
    ring.add(Kind.STEP, a=2)
    ring.add(Kind.STEP, a=3)
    ring.words[Word.WRITTEN] -= 1
    assert [record.values[0] for record in reader.read()] == [1]
    reader.ended = True
    assert [record.values[0] for record in reader.read()] == [2, 3]
    assert list(reader.read()) == []


def test_a_label_is_written_once_and_never_beyond_its_room() -> None:
    ring = Ring()
    assert ring.label("x") == ring.label("x") != ring.label("y")
    used = ring.words[Word.LABELS]
    ring.label("x")
    assert ring.words[Word.LABELS] == used
    numbers = [ring.label("n" * 4000 + str(number)) for number in range(400)]
    assert numbers[0] > 0
    assert numbers[-1] == 0
    assert RingReader(ring.memory).name(numbers[3]) == "n" * 4000 + "3"
    assert RingReader(ring.memory).name(0) == ""


def test_threads_add_labels_one_after_the_other() -> None:
    """While one thread writes a label, another adds the same label and a new one."""
    ring, numbers = Ring(), {}
    reader = RingReader(ring.memory)

    def work() -> None:
        numbers.update({name: ring.label(name) for name in ("same", ("same", "other"), "other")})

    class Paused:
        def __setitem__(self, place: slice, data: bytes) -> None:
            ring.view = view
            other.start()
            other.join(0.2)  # the other thread waits for this one
            view[place] = data

    other, view = threading.Thread(target=work), ring.view
    ring.view = Paused()  # type: ignore[assignment]
    same = ring.label("same")
    other.join()
    assert same == numbers["same"]
    assert {reader.name(number): number for number in numbers.values()} == numbers
    assert reader.labels == ["", "same", "other", ("same", "other")]


def test_a_slow_reader_knows_how_much_it_has_lost() -> None:
    ring = Ring()
    reader = RingReader(ring.memory)
    for number in range(CAPACITY + 10):
        ring.add(Kind.STEP, a=number)
    values = [record.values[0] for record in reader.read()]
    lost = 10 + ring_module._WRITERS  # these slots might be overwritten while they are being copied
    assert values == list(range(lost, CAPACITY + 10))
    assert reader.lost == lost
    ring.add(Kind.STEP, a=77)
    reader.skip()
    assert list(reader.read()) == []


def test_threads_write_without_losing_a_record() -> None:
    ring, each = Ring(), 3000
    reader = RingReader(ring.memory)

    def write(kind: int) -> None:
        for number in range(each):
            ring.add(kind, a=number)

    threads = [threading.Thread(target=write, args=(kind,)) for kind in (1, 2, 3)]
    for thread in threads:
        thread.start()
    read_records = []
    while any(thread.is_alive() for thread in threads):
        read_records += list(reader.read())
    read_records += list(reader.read())
    for kind in (1, 2, 3):
        assert [record.values[0] for record in read_records if record.kind == kind] == list(range(each))


def test_a_record_that_is_not_complete_is_left_for_later() -> None:
    ring = Ring()
    reader = RingReader(ring.memory)
    ring.add(Kind.STEP, a=0)
    unfinished = next(ring.numbers)  # by a thread that has not written its record yet
    ring.add(Kind.STEP, a=2)
    assert [record.values[0] for record in reader.read()] == [0]
    ring.numbers = iter([unfinished, 3])
    ring.add(Kind.STEP, a=1)
    ring.words[Word.WRITTEN] = 3
    assert [record.values[0] for record in reader.read()] == [1, 2]
    assert list(records(7, b"")) == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_another_process_reads_it_also_after_its_end() -> None:
    program = (
        "from ringdance.core.ring import *\n"
        "ring = Ring(shared_memory()); ring.describe(1, 2, 'h'); ring.add(Kind.STEP, ring.label('s'), a=42)\n"
        "print('ready', flush=True); input()"
    )
    line = [sys.executable, "-c", program]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        reader = open_ring(process.pid)
        assert reader
        process.kill()
        process.wait()
    assert reader.who == Who(1, "h", process.pid)
    (record,) = reader.read()
    assert (reader.name(record.label), record.values[0]) == ("s", 42)
    assert open_ring(process.pid) is None


def test_of_several_rings_of_a_process_the_open_one_is_found() -> None:
    rings = [Ring(shared_memory()) for _ in range(3)]
    for number, ring in enumerate(rings):
        ring.describe(number, 3, "h")
        ring.words[Word.CLOSED] = number != 1
    reader = open_ring(os.getpid())
    if hasattr(os, "memfd_create"):
        assert reader
        assert reader.who.rank == 1


def test_marks_of_a_higher_kind_count_alone() -> None:
    recorder = Recorder()
    script, tape, optimizer = StepMark.SCRIPT, StepMark.GRADIENTS, StepMark.OPTIMIZER
    counts = []
    for mark in (tape, tape, optimizer, tape, optimizer, script, optimizer, script, tape, script):
        recorder.step(mark)
        counts.append(recorder.words[Word.STEPS])
    assert counts == [1, 2, 1, 1, 2, 1, 1, 2, 2, 3]
    steps = [record for record in RingReader(recorder.ring.memory).read() if record.kind == Kind.STEP]
    assert [record.values[0] for record in steps] == [1, 2, 1, 2, 1, 2, 3]
    assert steps[-1].time == recorder.words[Word.LAST_STEP]


def test_steps_go_on_in_the_next_engine() -> None:
    ring = Ring()
    for mark in (StepMark.OPTIMIZER, StepMark.SCRIPT):
        recorder = Recorder(ring=ring)
        recorder.step(mark)
        recorder.step(mark)
    assert ring.words[Word.STEPS] == 4


def test_without_a_job_nothing_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session._process, "engine", None)
    mark_step()
    assert not session.is_initialized()
