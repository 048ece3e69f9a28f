"""A larger model with the same answers.

    python -m benchmarks.reference.pad --out FOLDER --width 768 --feed_forward 2560

Zeros are put around every weight of the reference model, so the larger one computes the same but for rounding, at the
cost of its size. With it the search's speed is measured on answers of real lengths (``benchmarks/search_speed.py``).
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.reference.train import save
from lpes_eval import reference
from lpes_eval.flags import at_least


def pad(model: LlamaForCausalLM, width: int, feed_forward: int) -> LlamaForCausalLM:
    """``model`` with hidden states of ``width`` numbers, as many more heads of the same size, and wider MLPs."""
    config, old = type(model.config)(**model.config.to_dict()), model.config
    config.hidden_size, config.intermediate_size = width, feed_forward
    config.num_attention_heads = config.num_key_value_heads = width // old.head_dim
    config.rms_norm_eps *= old.hidden_size / width  # the mean of the squares is taken over more numbers
    larger = LlamaForCausalLM(config).eval()
    after = larger.state_dict()
    for name, weight in model.state_dict().items():
        after[name].zero_()[tuple(map(slice, weight.shape))] = weight
        if name.endswith("norm.weight"):
            after[name] *= (old.hidden_size / width) ** 0.5
    return larger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--width", type=at_least(1), required=True, help="of hidden states; whole heads of 32")
    parser.add_argument("--feed_forward", type=at_least(1), required=True, help="width of the MLPs")
    args = parser.parse_args()
    model = LlamaForCausalLM.from_pretrained(reference.path())
    size, least = model.config.hidden_size, model.config.intermediate_size
    if args.width < size or args.width % model.config.head_dim or args.feed_forward < least:
        parser.error(f"expected --width {size} or more, a multiple of 32, and --feed_forward {least} or more")
    with torch.no_grad():
        larger = pad(model, args.width, args.feed_forward)
    args.out.mkdir(parents=True, exist_ok=True)
    save(larger, args.out)
    print(f"{args.out}: {larger.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
