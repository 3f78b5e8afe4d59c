"""Hugging Face's Trainer: one object in the list of callbacks repairs a learning rate that is 1000 times too small.

A small GPT-2 learns Python, letter by letter, from the source of Python's own `argparse`; twice from the same start.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, logging, set_seed

from onepass.integrations.transformers import OnePassCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=2000, help="weight steps (default %(default)s)")
args = parser.parse_args()
torch.set_num_threads(1)  # so small a network gains nothing from more
logging.set_verbosity(logging.ERROR)

letters = torch.tensor(list(inspect.getsource(argparse).encode("ascii", "replace")))
rows = [{"input_ids": row, "labels": row} for row in letters[: len(letters) // 32 * 32].view(-1, 32)]
config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=1, n_head=2)

variants: dict[str, list[Any]] = {"plain": [], "tuned": [OnePassCallback()]}
for name, callbacks in variants.items():
    set_seed(0)
    with tempfile.TemporaryDirectory() as out:
        options: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
        model: Any = GPT2LMHeadModel(config)
        trainer: Any = Trainer(
            model,
            TrainingArguments(
                out,
                max_steps=args.steps,
                learning_rate=1e-5,
                lr_scheduler_type="constant",
                per_device_train_batch_size=8,
                per_device_eval_batch_size=64,
                save_strategy="no",
                **options,
            ),
            train_dataset=rows[:-512],
            eval_dataset=rows[-512:],
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        loss, lr = trainer.evaluate()["eval_loss"], trainer.optimizer.param_groups[0]["lr"]
        print(f"{name}: validation loss {loss:.3f}, lr {lr:.3g}")
