"""Train a recipe with several seeds, and draw each seed's loss and evaluations: are the defaults stable?

    python benchmarks/seeds.py seeds.svg -- python job/train_torch.py clicks --epochs 6

Appends `--seed N`, starting from 0, to the command, and reads the losses and evaluations from its output.
Writes a plot. Prints each seed's first and last loss, its best evaluation, and the largest drop of an
evaluation below an earlier best.
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
    """Run a training. Returns epochs and losses, epochs and evaluations, and the evaluations' name."""
    losses, evaluations, name, epoch = Points(), Points(), "", 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            words = line.removeprefix("[0] ").split()
            if re.fullmatch(r"\d+\.\d\d \d+ \S+ \d+\.\d+", " ".join(words[:4])):
                epoch = float(words[0])
                losses.append((epoch, float(words[3])))
            elif match := _EVALUATION.search(line):
                name = match[1]
                evaluations.append((epoch, float(match[2]) / (100 if match[3] else 1)))
    if process.returncode or not losses:
        sys.exit(f"exit code {process.returncode}, {len(losses)} losses: {' '.join(command)}")
    return losses, evaluations, name


def fall(evaluations: Points) -> float:
    """Return the largest drop of an evaluation below an earlier best."""
    scores = [score for _, score in evaluations]
    return max((max(scores[:n]) - score for n, score in enumerate(scores) if n), default=0.0)


def main() -> None:
    """Train, print and draw."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="training command, after --")
    options = parser.parse_args()
    options.plot.touch()  # fail before training if the file cannot be written
    panels: dict[str, dict[str, Points]] = {}
    print("| seed | first loss | last loss | best evaluation | largest fall |", *["|---" * 5 + "|"], sep="\n")
    for seed in range(options.seeds):
        losses, evaluations, name = trained([*options.command, "--seed", str(seed)])
        panels.setdefault("loss", {})[f"seed {seed}"] = losses
        if evaluations:
            panels.setdefault(name, {})[f"seed {seed}"] = evaluations
        best = max((score for _, score in evaluations), default=float("nan"))
        figures = losses[0][1], losses[-1][1], best, max(0.0, fall(evaluations))
        print(f"| {seed} |", *(f"{one:.4f} |" for one in figures), flush=True)
    svg.write(options.plot, panels, ["epochs"] * len(panels), list(panels), from_zero=False)


if __name__ == "__main__":
    main()
