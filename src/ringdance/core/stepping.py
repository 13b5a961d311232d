"""What an engine does in a step, and in a check of its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringdance.core.callers import Callers
from ringdance.core.ends import EngineEnd
from ringdance.core.exchange import Context
from ringdance.core.peers import Peers
from ringdance.core.process_sets.registry import ProcessSets


@dataclass(eq=False)
class Stepper:
    """Advances the process sets of one engine.

    Thread: any, one at a time. ``progress`` decides which and when.

    Attributes:
        sets: The process sets.
        context: Counters of the engine's exchanges.
        callers: What threads wait for.
        peers: The other ranks.
        end: Whether and how the engine has ended.
        on_check: Called in each check of the peers.
        report: Receives warnings.
    """

    sets: ProcessSets
    context: Context
    callers: Callers
    peers: Peers
    end: EngineEnd
    on_check: Callable[[], None]
    report: Callable[[str], None]

    def step(self) -> bool:
        """Advance all process sets without blocking. Returns True if any made progress."""
        if self.end.closed:
            return False
        sets, context = self.sets, self.context
        before = context.achieved
        try:
            for machine in sets.machines:
                if next(machine[1], self) is self:
                    sets.machines = tuple(m for m in sets.machines if m is not machine)
                    context.achieved += 1
            if not sets.machines:
                self.end.close()
        except BaseException as error:
            self.end.fail_by(error)
            if not isinstance(error, Exception):
                raise
        return context.achieved != before

    def check_peers(self) -> None:
        """Read notes, detect lost peers and check for stalls."""
        end, peers = self.end, self.peers
        if end.closed:
            return
        try:
            peers.read_notes()
            self.sets.check_left(peers.post)
            self.context.recorder.publish()
            self.on_check()
            for state in self.sets.states():
                for device in state.exchange.devices.values():
                    device.check()
            if not end.closed and (lost := peers.lost()):
                peers.read_notes()  # an earlier note from the lost rank says more
                if not end.closed:
                    end.fail_lost(lost)
            if end.closed:
                return
            warning, error = peers.stall()
            if error is not None:
                end.fail(error(warning))
            elif warning:
                self.report(warning)
        except Exception as error:
            end.fail_by(error)
