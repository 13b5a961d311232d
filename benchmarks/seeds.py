"""Train a recipe with several seeds, and draw each one's loss and evaluations: are its defaults stable?

    python benchmarks/seeds.py seeds.svg -- python job/train_torch.py clicks --epochs 6

`--seed N` is added to the command, from 0 on. Its table of losses and its evaluations are read from what it
prints. Writes a plot. Prints the first and the last loss of each seed,
the best evaluation, and the most that one fell below the best before it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from ringdance.tools.report import svg

_EVALUATION = re.compile(r"\b(AUC|top-1|bbox AP)\s+(\d[\d.]*)(%?)")
Points = list[tuple[float, float]]


def trained(command: list[str]) -> tuple[Points, Points, str]:
    """Run a training; return epochs and losses, epochs and evaluations, and what those are of."""
    losses, evaluations, name, epoch = Points(), Points(), "", 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            words = line.removeprefix("[0] ").split()
            if re.fullmatch(r"\d+\.\d\d \d+ \S+ \d+\.\d+", " ".join(words[:4])):
                epoch = float(words[0])
                losses.append((epoch, float(words[3])))
            elif found := _EVALUATION.search(line):
                name = found[1]
                evaluations.append((epoch, float(found[2]) / (100 if found[3] else 1)))
    if process.returncode or not losses:
        sys.exit(f"exit code {process.returncode}, {len(losses)} losses: {' '.join(command)}")
    return losses, evaluations, name


def fall(evaluations: Points) -> float:
    """Return the most that an evaluation is below the best before it."""
    scores = [score for _, score in evaluations]
    return max((max(scores[:n]) - score for n, score in enumerate(scores) if n), default=0.0)


def main() -> None:
    """Train, print and draw."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    given = parser.parse_args()
    given.plot.touch()  # before anything is trained for it
    panels: dict[str, dict[str, Points]] = {}
    print("| seed | first loss | last loss | best evaluation | largest fall |", *["|---" * 5 + "|"], sep="\n")
    for seed in range(given.seeds):
        losses, evaluations, name = trained([*given.command, "--seed", str(seed)])
        panels.setdefault("loss", {})[f"seed {seed}"] = losses
        if evaluations:
            panels.setdefault(name, {})[f"seed {seed}"] = evaluations
        best = max((score for _, score in evaluations), default=float("nan"))
        figures = losses[0][1], losses[-1][1], best, max(0.0, fall(evaluations))
        print(f"| {seed} |", *(f"{one:.4f} |" for one in figures), flush=True)
    svg.write(given.plot, panels, ["epochs"] * len(panels), list(panels), from_zero=False)


if __name__ == "__main__":
    main()
