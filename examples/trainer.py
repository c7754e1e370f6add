"""Train a Differential Transformer under transformers' Trainer.

    python examples/trainer.py --text my.txt --output runs/trainer
    python examples/trainer.py --model llama-v2 --text my.txt --output runs/further

Without --model it is a small new one, and takes half a minute on a CPU; the rest is what any size needs. A Llama that
`diff-transformer convert` has made differential is trained on by the second command, and so is the Llama itself.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

from diff_lab.data import byte_tokenizer
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.dex_annealing import DexAnnealing

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--text", default=argparse.__file__, help="a text file; a module of Python's own unless given")
parser.add_argument("--output", default="runs/trainer", help="folder for checkpoints, and for the model at the end")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
parser.add_argument("--learning-rate", type=float, help="3e-3 unless given; with --model 1e-4")
start = parser.add_mutually_exclusive_group()
start.add_argument("--model", help="a folder or name of a model to train on, with its tokenizer; else a new one")
start.add_argument("--attention", choices=("diff", "diff_v2", "softmax"), help="of a new one; softmax: the Transformer")
arguments = parser.parse_args()

if arguments.model:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # It knows ours once diff_transformer is imported. Weights of half precision would lose small steps.
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    if arguments.length > model.config.max_position_embeddings:
        parser.error(f"--length must be at most the model's context, {model.config.max_position_embeddings}")
else:
    # Any tokenizer does. This one has a token for each byte and needs no file.
    tokenizer = byte_tokenizer()
    model = DiffTransformerForCausalLM(
        DiffTransformerConfig(
            attention_type=arguments.attention or "diff",
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
tokens = tokenizer(Path(arguments.text).read_text(encoding="utf-8"), verbose=False)["input_ids"]
blocks = [tokens[i : i + arguments.length] for i in range(0, len(tokens) - arguments.length + 1, arguments.length)]
if len(blocks) < 2:
    parser.error(f"--text must have two sequences of --length or more, and has {len(tokens)} tokens")
# The model shifts the labels by itself; a label of -100 is left out.
data = Dataset.from_dict({"input_ids": blocks, "labels": blocks}).train_test_split(test_size=0.1, seed=0)

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,  # a step of 16 sequences: its loss is the mean over all their tokens
        learning_rate=arguments.learning_rate or (1e-4 if arguments.model else 3e-3),
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
    data_collator=default_data_collator,  # rows of one length need no padding token, which many a Llama has not
    callbacks=[DexAnnealing()] if getattr(model.config, "attention_type", None) == "dex" else [],
)
trainer.train()
trainer.save_model()  # diff-transformer generate OUTPUT --prompt "def "
