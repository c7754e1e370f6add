"""Train a Differential Transformer under transformers' Trainer.

    python examples/trainer.py --text my.txt --output runs/trainer

The sizes are those of a first try on a CPU, half a minute; the rest is what any size needs.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.data import byte_tokenizer

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--text", default=argparse.__file__, help="a text file; a module of Python's own unless given")
parser.add_argument("--output", default="runs/trainer", help="folder for checkpoints, and for the model at the end")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
parser.add_argument("--attention", default="diff", choices=("diff", "diff_v2", "softmax"), help="softmax: Transformer")
arguments = parser.parse_args()

# Any tokenizer does. This one has a token for each byte and needs no file.
tokenizer = byte_tokenizer()
tokens = tokenizer(Path(arguments.text).read_text(encoding="utf-8"))["input_ids"]
blocks = [tokens[i : i + arguments.length] for i in range(0, len(tokens) - arguments.length + 1, arguments.length)]
# The model shifts the labels by itself; a label of -100 is left out.
data = Dataset.from_dict({"input_ids": blocks, "labels": blocks}).train_test_split(test_size=0.1, seed=0)

model = DiffTransformerForCausalLM(
    DiffTransformerConfig(
        attention_type=arguments.attention,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=arguments.length,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,  # a step of 16 sequences: its loss is the mean over all their tokens
        learning_rate=3e-3,
        adam_beta2=0.95,
        weight_decay=0.1,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        bf16=torch.cuda.is_available(),
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=30,
        report_to=[],
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()  # diff-transformer generate OUTPUT --prompt "def "
