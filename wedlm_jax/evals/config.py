"""EvaluationConfig: what `python -m wedlm_jax.evaluate --exp NAME` measures."""

from __future__ import annotations

import dataclasses

from wedlm_jax.config_tree import check_choices
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.errors import UserError
from wedlm_jax.evals.scoring import Match
from wedlm_jax.evals.tasks import task


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Held-out tasks and text, and the decoders that are compared on them."""

    tasks: tuple[str, ...] = ("word_problems", "counting", "copying")
    # A JSONL file of questions with answers (evals/questions.py): one more task, of all its lines.
    questions: str | None = None
    match: Match = "number"  # what of a completion has to equal the same of its answer: evals/scoring.py
    problems_per_task: int = 100  # at most: counting has fewer that are held out; the table gives each n
    held_out_files: int = 0  # files of stdlib_code whose bits per byte are measured; 0 = none
    masked_loss_rows: int = 0  # held-out rows whose masked-token loss is measured; 0 = none
    text_prompts: int = 0  # held-out documents to continue behind their prompts; 0 = none
    text_prompt_characters: int = 240  # length of the prompts from stdlib_code; whole lines, so at least this
    batch_size: int = 1  # prompts decoded at once, the same for every decoder; 1 is the speed that one user sees
    max_new_tokens: int = 64
    window_size: int = 16  # W of streaming, verified and lookup
    entropy_thresholds: tuple[float, ...] = (0.1, 0.4, 1.0)  # tau of the streaming rows
    verified_entropy_threshold: float = 0.7
    # Further W of verified decoding, a row each: a CPU is fastest with a narrow one.
    verified_windows: tuple[int, ...] = ()
    text_drafts: bool = True  # of verified decoding; False: what masks alone are worth
    distance_penalty: float = 0.02
    block_size: int = 32
    confidence_threshold: float = 0.9
    in_place: bool = False  # also measure masks left in their places: decoding and mask recovery without reordering
    seed: int = 0  # which held-out problems

    def __post_init__(self) -> None:
        check_choices(self, "evaluation")
        for name in self.tasks:
            task(name)
        for name in ("problems_per_task", "text_prompt_characters", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"evaluation.{name}={getattr(self, name)}: must be at least 1")
        for name in ("held_out_files", "masked_loss_rows", "text_prompts"):
            if getattr(self, name) < 0:
                raise UserError(f"evaluation.{name}={getattr(self, name)}: must be 0 (off) or more")
        if self.seed < 0:
            raise UserError(f"evaluation.seed={self.seed}: must be at least 0")
        # DecodeConfig checks the rest
        self.autoregressive, self.blockwise, self.verified, self.verified_at, self.lookup, self.streaming  # noqa: B018

    @property
    def autoregressive(self) -> DecodeConfig:
        return DecodeConfig(decoder="ar", max_new_tokens=self.max_new_tokens)

    @property
    def blockwise(self) -> DecodeConfig:
        return DecodeConfig(
            decoder="blockwise",
            block_size=self.block_size,
            confidence_threshold=self.confidence_threshold,
            max_new_tokens=self.max_new_tokens,
        )

    @property
    def verified(self) -> DecodeConfig:
        config = self._window("verified", self.verified_entropy_threshold)
        return dataclasses.replace(config, text_drafts=self.text_drafts)

    @property
    def verified_at(self) -> tuple[DecodeConfig, ...]:
        """One for each of `verified_windows`."""
        return tuple(dataclasses.replace(self.verified, window_size=window) for window in self.verified_windows)

    @property
    def lookup(self) -> DecodeConfig:
        return DecodeConfig(decoder="lookup", window_size=self.window_size, max_new_tokens=self.max_new_tokens)

    @property
    def streaming(self) -> tuple[DecodeConfig, ...]:
        """One for each entropy threshold."""
        return tuple(self._window("streaming", tau) for tau in self.entropy_thresholds)

    def _window(self, decoder: str, tau: float) -> DecodeConfig:
        return DecodeConfig(
            decoder=decoder,  # type: ignore[arg-type]
            window_size=self.window_size,
            entropy_threshold=tau,
            distance_penalty=self.distance_penalty,
            max_new_tokens=self.max_new_tokens,
        )
