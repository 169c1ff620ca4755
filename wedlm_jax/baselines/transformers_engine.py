"""Greedy decoding by Hugging Face transformers: a script, see `answers.py`."""

from __future__ import annotations

from answers import Engine, Job, serve


def load(job: Job) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and job["platform"] != "cpu":
        raise RuntimeError(
            f"JAX runs on a {job['platform']} and this torch would on the CPU; name a --python whose torch sees a GPU, or set "
            f"JAX_PLATFORMS=cpu for both"
        )
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, device_map=None).eval()
    torch.nn.Module.to(model, device)
    model.generation_config = GenerationConfig()  # plain greedy AR; a request names what ends it

    def generate(request: Job) -> Job:
        stop_ids = set(request["stop_ids"])
        prompts = torch.tensor(request["prompts"], device=device)  # of one length
        with torch.inference_mode():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=request["max_new_tokens"],
                do_sample=False,
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=0,
            )
        rows = out[:, prompts.shape[1] :].tolist()
        ends = [next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row)) for row in rows]
        return {"ids": [row[:end] for row, end in zip(rows, ends, strict=True)]}

    return generate


if __name__ == "__main__":
    serve(load)
