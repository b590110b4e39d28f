"""The other side of test_hf_live: `python transformers_side.py OUTPUT.npz FOLDER...`, in a Python with torch and transformers.

Of each folder: float32 logits of its tokens.npy [1, 64], and 8 tokens that `generate` draws greedily after the first 16.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers


def main(output, *folders):
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {}
    for folder in map(pathlib.Path, folders):
        model, notes = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"], (folder, notes)
        tokens = torch.tensor(np.load(folder / "tokens.npy"), dtype=torch.long)
        greedy = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
        with torch.no_grad():
            found[f"{folder.name}/logits"] = model.eval()(input_ids=tokens).logits.numpy()
            drawn = model.generate(tokens[:, :16], attention_mask=torch.ones(1, 16), generation_config=greedy)
        found[f"{folder.name}/greedy"] = drawn[:, 16:].numpy()
    np.savez(output, **found)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}: {len(folders)} folders")


if __name__ == "__main__":
    main(*sys.argv[1:])
