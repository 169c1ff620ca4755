"""Draw the curves of one or several runs.

python -m wedlm_jax.metrics runs/quickstart
python -m wedlm_jax.metrics runs/quickstart_base runs/quickstart --out curves.png
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from wedlm_jax.errors import UserError, entry
from wedlm_jax.flags import parse
from wedlm_jax.metrics.curves import draw_curves
from wedlm_jax.metrics.writers import METRICS_FILE, read_metrics
from wedlm_jax.results import make_folder, save_figure


@dataclasses.dataclass(frozen=True)
class Curves:
    workdirs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="WORKDIR...")] = ()
    """workdirs of wedlm_jax.train"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PNG")] = None
    """the picture; curves.png in the first workdir if not given"""


@entry
def main() -> None:
    flags = parse(Curves, prog="python -m wedlm_jax.metrics", description=__doc__)
    if not flags.workdirs:
        raise UserError("name at least one workdir: python -m wedlm_jax.metrics runs/NAME")
    out = flags.out or flags.workdirs[0] / "curves.png"
    if out.suffix != ".png":
        raise UserError(f"--out {out}: name a .png file")
    runs = {str(workdir): read_metrics(workdir) for workdir in flags.workdirs}
    for workdir, lines in runs.items():
        if not lines:
            raise UserError(f"{workdir}/{METRICS_FILE}: no step is logged yet")
    make_folder(out.parent)
    figure = draw_curves(runs)
    save_figure(out, figure)
    print(f"wrote {out}: {', '.join(axes.get_title() for axes in figure.axes)}")


if __name__ == "__main__":
    main()
