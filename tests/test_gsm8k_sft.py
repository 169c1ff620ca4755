"""gsm8k_sft trains on a prepared tfds dataset of GSM8K's form, made of our own problems, and is scored on others."""

import json
import sys

import tensorflow_datasets as tfds

from tests.test_notebooks import chat_model  # noqa: F401  a fixture
from wedlm_jax.data.quickstart_tasks import draw
from wedlm_jax.evaluate import main as evaluate
from wedlm_jax.metrics.writers import read_metrics
from wedlm_jax.train import main


class Problems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    name = "gsm8k"
    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # of a test, where there are no checksums of downloads

    def _info(self):
        fields = ("question", "answer", "annotation", "short_answer")
        features = tfds.features.FeaturesDict({field: tfds.features.Text() for field in fields})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(80), "test": self._generate_examples(1)}

    def _generate_examples(self, count):
        for i in range(count):
            problem = draw("word_problems", "train", 0, i)
            steps, _, number = problem.solution.partition("\n#### ")
            yield i, {
                "question": problem.prompt, "answer": problem.solution, "annotation": steps, "short_answer": number
            }  # fmt: skip


def test_gsm8k_sft_trains_on_a_prepared_dataset_and_is_scored_on_questions(chat_model, tmp_path, monkeypatch):  # noqa: F811
    builder = Problems(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    overrides = [f"model.path={chat_model}", f"data.path={builder.data_dir}", "data.row_length=128"]
    small = ["train.steps=2", "train.batch_size=8", "train.eval_every=0"]
    monkeypatch.setattr(
        sys, "argv", ["train", "--exp", "gsm8k_sft", "--workdir", str(tmp_path / "run"), *overrides, *small]
    )
    main()
    (line,) = read_metrics(tmp_path / "run")
    assert line["step"] == 2 and line["tokens"] > 200 and line.get("skipped_records", 0) == 0

    problems = [draw("word_problems", "held_out", 0, i) for i in range(3)]
    records = [
        {"messages": [{"role": "user", "content": problem.prompt}], "answer": problem.solution} for problem in problems
    ]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    fields = {"questions": tmp_path / "gsm8k.jsonl", "max_new_tokens": 4, "text_prompts": 0, "masked_loss_rows": 0}
    monkeypatch.setattr(
        sys, "argv",
        ["evaluate", "--exp", "gsm8k_sft", "--workdir", str(tmp_path / "run"), "--out", str(tmp_path / "scores")]
        + [f"evaluation.{name}={value}" for name, value in fields.items()],
    )  # fmt: skip
    evaluate()
    rows = json.loads((tmp_path / "scores" / "results.json").read_text())["rows"]
    assert {row["label"] for row in rows} >= {"AR, base", "AR, adapted", "streaming, tau=0.4", "verified"}
    assert all((row["task"], row["n"]) == ("gsm8k", 3) and row["accuracy"] is not None for row in rows)
