"""Greedy decoding by vLLM: a script, see `answers.py`."""

from __future__ import annotations

from answers import Engine, Job, serve


def load(job: Job) -> Engine:
    from vllm import LLM, SamplingParams

    model = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["context"],
        max_num_seqs=job["rows"],
        # As much cache as the batches take, and no share of the memory: by itself vLLM takes nearly all, and JAX lives here too.
        kv_cache_memory_bytes=job["cache_bytes"],
        gpu_memory_utilization=0.01,
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(request: Job) -> Job:
        settings = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_new_tokens"],
            stop_token_ids=request["stop_ids"],
            ignore_eos=True,  # a request names what ends it
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = model.generate(prompts, settings, use_tqdm=False)
        return {"ids": [list(output.outputs[0].token_ids) for output in outputs]}

    return generate


if __name__ == "__main__":
    serve(load)
