"""The official WeDLM engine of the user's own checkout, one device: a script, see `answers.py`.

The engine's scheduler, block manager, decoder, sampler, model and paged cache are its own. It runs on the CPU, on any
machine: what it needs CUDA for is given to it at run time, by the code below: flash attention over the paged cache, the
Triton kernel that writes it, the placement of tensors, and sizing the cache by free GPU memory. Nothing is compiled
(TORCHDYNAMO_DISABLE, no CUDA graph). Two more stand-ins have other reasons: its norms work in place, which in float32, where
a cast copies nothing, would overwrite the residual stream; and it reads `rope_theta` where newer versions of transformers no
longer keep it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from typing import Any

from answers import Engine, Job, serve

BLOCK = 256  # slots of a page of the cache, the least that the engine takes


def load(job: Job) -> Engine:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch

    sys.path.insert(0, job["checkout"])
    if not os.path.isdir(os.path.join(job["checkout"], "wedlm", "engine")):
        raise ValueError(f"{job['checkout']} is no checkout of the official repository: it has no wedlm/engine")
    import transformers.modeling_utils  # noqa: F401  (before there is a stand-in for triton, which it would ask)

    with _cuda_modules():
        from wedlm.engine import llm_engine, model_runner, wedlm_decoder
        from wedlm.layers import attention, layernorm
        from wedlm.sampling_params import SamplingParams

    tensors: Any = torch.Tensor
    tensors.cuda = lambda self, *_, **__: self
    model_runner.torch = wedlm_decoder.torch = _TorchOnCPU()
    attention.store_kvcache = _write_slots
    attention.flash_attn_varlen_func = _attend_pages
    layernorm.RMSNorm.forward = _norm
    slots = job["rows"] * (job["context"] + 2 * job["window_size"] + BLOCK)
    model_runner.ModelRunner._init_distributed = _one_process
    model_runner.ModelRunner.warmup_model = lambda self: None
    model_runner.ModelRunner.allocate_kv_cache = lambda self: _allocate(self, slots // BLOCK + 1)
    read_config = llm_engine.Config.__post_init__

    def read_config_and_rope(config):
        read_config(config)
        rope = getattr(config.hf_config, "rope_parameters", None)
        if rope:
            config.hf_config.rope_theta, config.hf_config.rope_scaling = rope["rope_theta"], None
        config.hf_config.dtype = getattr(torch, job["dtype"])

    llm_engine.Config.__post_init__ = read_config_and_rope
    engine = llm_engine.LLMEngine(
        job["model"], enforce_eager=True, kvcache_block_size=BLOCK, wedlm_window_size=job["window_size"],
        mask_token_id=job["mask_token_id"], max_num_seqs=job["rows"],
        max_num_batched_tokens=max(16384, job["rows"] * job["context"]),
    )  # fmt: skip
    engine.eos_token_id = None  # a request names what ends it
    fed: list[dict[int, int]] = []  # of each step, the slots of every sequence
    prepare = engine.model_runner.wedlm_decoder.prepare_decode_inputs

    def counted(seqs):
        prepared = prepare(seqs)
        if prepared is not None:
            sequences = (sequence.seq_id for sequence in prepared.active_seqs)
            sizes = dict(zip(sequences, prepared.context.per_seq_wedlm_sizes.tolist(), strict=True))
            fed.append(sizes)
        return prepared

    engine.model_runner.wedlm_decoder.prepare_decode_inputs = counted

    def generate(request: Job) -> Job:
        if not engine.is_finished():
            raise RuntimeError("what is left of a request that failed would be decoded beside this one")
        fed.clear()
        start = time.perf_counter()
        for prompt in request["prompts"]:
            engine.add_request(
                prompt,
                SamplingParams(
                    temperature=0.0, max_tokens=request["max_new_tokens"], stop_token_ids=list(request["stop_ids"]),
                    wedlm_entropy_threshold=request["entropy_threshold"],
                    wedlm_pos_penalty_factor=request["distance_penalty"],
                ),
            )  # fmt: skip
        order = [seq.seq_id for seq in engine.scheduler.waiting]
        done: dict[int, list[int]] = {}
        in_decoding = 0.0
        while not engine.is_finished():
            before, steps = time.perf_counter(), len(fed)
            done |= dict(engine.step()[0])
            if len(fed) > steps:
                in_decoding += time.perf_counter() - before
        return {
            "ids": [done[seq] for seq in order],
            "forwards": [sum(seq in sizes for sizes in fed) for seq in order],
            "processed": [sum(sizes.get(seq, 0) for sizes in fed) for seq in order],
            "seconds": time.perf_counter() - start,
            "decode_seconds": in_decoding,
            "steps": len(fed),
        }

    return generate


@contextlib.contextmanager
def _cuda_modules():
    """The two modules that its attention imports, while it does."""
    language = _module("triton.language", constexpr=int)
    stand_ins = {
        "triton": _module("triton", jit=lambda kernel: kernel, language=language),
        "triton.language": language,
        "flash_attn": _module("flash_attn", flash_attn_varlen_func=None),
    }
    kept = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    yield
    for name in stand_ins:
        del sys.modules[name]
    sys.modules.update(kept)


def _module(name: str, **attributes) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    return module


class _TorchOnCPU:
    """torch, where a device that is asked for is the CPU."""

    def __getattr__(self, name):
        import torch

        return getattr(torch, name)

    def tensor(self, data, *, device=None, pin_memory=False, **options):
        import torch

        return torch.tensor(data, **options)

    def device(self, name):
        return "cpu"

    def set_default_device(self, name) -> None:
        pass


def _one_process(runner, config) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)


def _allocate(runner, pages: int) -> None:
    import torch

    config = runner.config.hf_config
    runner.config.num_kvcache_blocks = pages
    for module in runner.model.modules():
        if hasattr(module, "k_cache"):
            shape = (pages, BLOCK, module.num_kv_heads, config.head_dim)
            module.k_cache, module.v_cache = torch.zeros(shape), torch.zeros(shape)


def _write_slots(key, value, k_cache, v_cache, slot_mapping) -> None:
    slots = slot_mapping.long()
    k_cache.flatten(0, 1)[slots] = key
    v_cache.flatten(0, 1)[slots] = value


def _attend_pages(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, block_table=None
):
    """Causal attention of ragged rows, the last query beside the last key: one dense call over padded rows.

    q [tokens, heads, dim]; k and v the same for prefill, or pages [pages, slots, heads, dim] and `block_table` [rows, pages].
    """
    import torch

    queries, keys = (ends.diff().long() for ends in (cu_seqlens_q, cu_seqlens_k))
    query = torch.arange(int(queries.max()))
    key = torch.arange(int(keys.max()))
    real = query < queries[:, None]
    place = (cu_seqlens_q[:-1].long()[:, None] + query).clamp(max=len(q) - 1)
    if block_table is None:
        source = (cu_seqlens_k[:-1].long()[:, None] + key).clamp(max=len(k) - 1)
    else:
        pages = block_table.long().clamp(min=0)[:, key // k.shape[1]]
        source = pages * k.shape[1] + key % k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    seen = key <= (keys - queries)[:, None, None] + query[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q[place], k[source], v[source]))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)[real]


def _norm(norm, x, residual=None):
    import torch

    if residual is None:
        return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    residual = x + residual
    return torch.nn.functional.rms_norm(residual, norm.weight.shape, norm.weight, norm.eps), residual


if __name__ == "__main__":
    serve(load)
