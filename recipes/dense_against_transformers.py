"""Perplexity of the embedded int8 model, dense, beside transformers in fp32 on the original.

Usage: python recipes/dense_against_transformers.py ORIGINAL_FOLDER RESULT.json [TOKENS]
Both read the same windows of the held-out text that the package carries.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dejavu.embedded import HELDOUT_TEXT, MODEL
from dejavu.eval.perplexity import evaluate
from dejavu.eval.text import Window, read_text
from dejavu.load import load_model
from dejavu.weights.tokenizer import load_tokenizer


def transformers_loss(folder: str, windows: list[Window]) -> float:
    """Mean loss in nats, fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in windows:
            losses = torch.nn.functional.cross_entropy(
                model(window.ids[None, :-1]).logits[0].double(), window.ids[1:], reduction="none"
            )[window.skip :]
            total, count = total + float(losses.sum()), count + len(losses)
    return total / count


def main() -> None:
    """Measure both and write the result."""
    original, result = sys.argv[1:3]
    tokens = int(sys.argv[3]) if sys.argv[3:] else 24576
    loaded = load_model(MODEL)
    tokenizer = load_tokenizer(loaded.checkpoint)
    text = read_text(HELDOUT_TEXT, tokenizer, loaded.model.config.context_length, max_tokens=tokens)
    ours = evaluate(loaded.model, text)
    theirs = transformers_loss(original, text.windows)
    ratio = float(torch.tensor(ours.loss - theirs, dtype=torch.float64).exp())
    found = {"ours_int8": ours.to_json(), "transformers_fp32_loss": theirs, "ratio": ratio}
    Path(result).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"int8 dense / transformers fp32: {ratio:.5f} on {ours.tokens} tokens")


if __name__ == "__main__":
    main()
