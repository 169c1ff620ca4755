"""The official trainer's training step, one at a time on demand: the torch side of `official.py`.

    python official_step.py CHECKOUT

Runs in an environment of its own, with torch and without this package. The step is the trainer's own loop over its own batch
builder, model, losses, clipping, AdamW and schedule, with the `dense` backend; the loop is given a data loader that waits for
the next request. Replaced at run time: `accelerate` (one device, which needs nothing of it), loading a model from disk (its
model class with random parameters), the mask id (it lies outside a small vocabulary), and the loop's data.

Reads JSON lines: the job, then "start", "step" and "peak"; answers each with one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import sys
import time
import types
import warnings

import torch
import transformers.modeling_utils  # noqa: F401  (before there is a stand-in for accelerate, which it would ask)

CHECKOUT = sys.argv[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class OneDevice:
    """What the trainer asks of accelerate."""

    device = DEVICE
    num_processes = 1
    sync_gradients = True
    is_main_process = is_local_main_process = False  # no log, no progress bar

    def prepare(self, *prepared):
        return prepared

    def unwrap_model(self, model):
        return model

    def accumulate(self, model):
        return contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, norm):
        torch.nn.utils.clip_grad_norm_(parameters, norm)


class OnDemand:
    """A data set of one batch, which the loop gets again whenever a step is asked for."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch
        self.losses: list[torch.Tensor] = []

    def __len__(self) -> int:
        return 100  # as many steps as the schedule of learning rates has on our side

    def __iter__(self):
        for line in sys.stdin:
            if json.loads(line) == "peak":
                answer({"bytes": torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None})
                continue
            start, processor = time.perf_counter(), time.process_time()
            yield self.batch
            loss = float(self.losses.pop())
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            seconds = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - processor}
            answer({**seconds, "loss": loss})
        answers.flush()
        os._exit(0)  # before the loop goes on to save a checkpoint


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    job = json.loads(sys.stdin.readline())
    sys.path[:1] = [os.path.join(CHECKOUT, "finetune"), CHECKOUT]  # not this folder, whose modules have common names
    with stand_in("accelerate", Accelerator=OneDevice):
        from hf_compat.configuration_wedlm import WeDLMConfig
        from hf_compat.modeling_wedlm import WeDLMForCausalLM, WeDLMPreTrainedModel
        from src import attention, config, trainer

    answer({"torch": torch.__version__, "threads": torch.get_num_threads()})
    assert json.loads(sys.stdin.readline()) == "start"

    torch.manual_seed(0)
    dtype = getattr(torch, job["dtype"])
    WeDLMPreTrainedModel.post_init = lambda self: None  # parameters are drawn here
    model = WeDLMForCausalLM(WeDLMConfig(pad_token_id=None, **job["model"])).to(DEVICE)
    if job["model"]["tie_word_embeddings"]:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            parameter.data = parameter.data.to(dtype)

    trainer.MASK_TOKEN_ID = job["mask_token_id"]
    tokens = torch.tensor(job["tokens"])
    ends = torch.arange(0, len(tokens) + 1, job["document_length"])
    data = OnDemand({"packed_input_ids": tokens, "packed_labels": tokens.clone(), "cum_seqlens": ends})
    # Without its __init__, which reads a tokenizer, a model and a data set from disk.
    run = object.__new__(trainer.WeDLMTrainer)
    run.accelerator, run.wandb, run.model = OneDevice(), None, model
    run.config = config.WeDLMTrainingConfig(
        block_size=job["block_size"], attention_backend="dense", num_train_epochs=1, gradient_accumulation_steps=1,
        learning_rate=1e-3, warmup_ratio=0.0, bf16=dtype == torch.bfloat16, logging_steps=10**9, save_steps=10**9,
    )  # fmt: skip
    run.attn_wrapper = attention.get_attention_wrapper("dense", job["model"]["head_dim"])
    run.train_sampler, run.train_dataset, run.train_dataloader = None, data, data
    run._prepare_training()
    step = run.train_step

    def recorded(batch):
        loss, logs = step(batch)
        data.losses.append(loss.detach())
        return loss, logs

    run.train_step = recorded
    answer({"parameters": sum(parameter.numel() for parameter in model.parameters())})
    run.train()


@contextlib.contextmanager
def stand_in(name: str, **attributes):
    """A module that is imported while it is missing."""
    if importlib.util.find_spec(name) is not None:
        yield
        return
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    yield
    del sys.modules[name]


def answer(message: dict) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    # What others print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
