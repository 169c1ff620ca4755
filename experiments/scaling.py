"""From what size on adapting costs nothing, and what breaks without RoPE (Figure 5c and the break condition in miniature).

    python -m wedlm_jax.train --exp scaling

Four sizes from 0.5M to 7.9M parameters, and the second of them once more with learned absolute positions, which are read by
place in memory: reordering moves a token away from its position, so masks cannot tell which place they stand for. Each is
trained from scratch (AR), adapted, and measured on held-out word problems (n = 200) before and after. The dashed line in the
panel of the differences is the threshold: to its left adapting has cost accuracy. One training seed, for two CPU cores have no
more time; `seeds=(0, 1, 2)` below trains three, whose spread is then in the plot. Table and plot land in runs/scaling.
"""

import dataclasses

from wedlm_jax.experiment import Experiment, Measure, Stage, Study, load_experiment, override

# Each size by its width D: heads of 32, F = 3 D, four layers. Wider models learn in fewer steps, and every base is to have learned
# the word problems before it is adapted. Steps are (AR, adaptation).
STEPS = {96: (2000, 800), 160: (1200, 500), 256: (800, 350), 384: (600, 250)}
