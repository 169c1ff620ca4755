"""Study: experiments side by side, each with several training seeds, as one command (an ablation, a scaling curve).

A study is a function `NAME() -> Study` in `experiments/NAME.py`; `python -m wedlm_jax.train --exp NAME` runs it. Every run
is a command that one could type, printed before it runs; what is finished is kept, so a stopped study goes on.
"""

from wedlm_jax.study.design import Curve, Measure, Stage, Study
from wedlm_jax.study.run import run_study

__all__ = ["Curve", "Measure", "Stage", "Study", "run_study"]
