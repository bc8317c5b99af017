"""Loads a finished student as anybody would, in a process of its own, and compares its logits.

Only plain transformers and peft take part. The job comes as JSON on standard input, the findings go
as JSON to standard output:

    python -m tasks.models.student_check < job.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Read the job, compare, print."""
    job = json.load(sys.stdin)
    torch.set_num_threads(int(job["threads"]))
    print(json.dumps(compare(job)))


def compare(job: dict[str, Any]) -> dict[str, Any]:
    """Return the largest difference of a logit for ``adapter`` and ``merged``, how large the
    logits are, and whether the merged model ties its embeddings as the base does and left the
    input embeddings as they were.

    Args:
        job: ``base``, ``adapter`` and ``merged`` directories; ``rows`` of prompt and response ids;
            ``logits``, a safetensors file with the trained student's logits before each response
            token, (T_i, V), by row number; ``device``.
    """
    device = torch.device(job["device"])
    expected = load_file(job["logits"])
    base = _load(job["base"], device)
    embeddings = base.get_input_embeddings().weight.detach().clone()
    found: dict[str, Any] = {"is_tied_in_base": _is_tied(base)}
    found["largest_logit"] = max(float(rows.abs().max()) for rows in expected.values())
    adapted = PeftModel.from_pretrained(base, job["adapter"]).to(device).eval()
    found["adapter"] = _largest_difference(adapted, job["rows"], expected, device)
    del adapted, base
    merged = _load(job["merged"], device)
    AutoTokenizer.from_pretrained(job["merged"], local_files_only=True)
    found["merged"] = _largest_difference(merged, job["rows"], expected, device)
    found["is_tied"] = _is_tied(merged)
    same = merged.get_input_embeddings().weight.shape == embeddings.shape
    found["same_embeddings"] = same and bool(
        torch.equal(merged.get_input_embeddings().weight, embeddings)
    )
    return found


def _load(directory: str, device: torch.device) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    return model.to(device).eval()


def _is_tied(model: Any) -> bool:
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    return bool(weights[0].data_ptr() == weights[1].data_ptr())


@torch.no_grad()
def _largest_difference(
    model: Any,
    rows: Sequence[tuple[list[int], list[int]]],
    expected: dict[str, Tensor],
    device: torch.device,
) -> float:
    largest = 0.0
    for index, (prompt, response) in enumerate(rows):
        ids = torch.tensor([[*prompt, *response]], device=device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
        difference = float((logits - expected[str(index)]).abs().max())
        # NaN compares as neither smaller nor larger.
        largest = difference if not difference <= largest else largest
    return largest


if __name__ == "__main__":
    main()
