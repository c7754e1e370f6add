"""Fine-tune a Differential Transformer on questions and answers under TRL's SFTTrainer (pip install trl).

    python examples/sft.py --model CHECKPOINT --data my.jsonl --output runs/sft

A line of the data is {"prompt": "2 + 3 =", "completion": " 5"}; only completions are learned. Without a checkpoint a
tiny model is trained from nothing, on sums: half a minute on a CPU.
"""

import argparse

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from diff_lab.data import byte_tokenizer
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--model", help="a checkpoint of ours with its tokenizer; a tiny new model unless given")
parser.add_argument("--data", help="a .jsonl file; sums unless given")
parser.add_argument("--output", default="runs/sft", help="folder for checkpoints, and for the model at the end")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--length", type=int, default=128, help="tokens of a row; what is longer is cut off at the end")
parser.add_argument("--learning-rate", type=float, default=3e-3, help="for a pretrained model rather 2e-5")
arguments = parser.parse_args()

if arguments.model:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # It knows ours once diff_transformer is imported. Weights of half precision would lose small steps.
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    if arguments.length > model.config.max_position_embeddings:
        parser.error(f"--length must be at most the model's context, {model.config.max_position_embeddings}")
else:
    tokenizer = byte_tokenizer()
    model = DiffTransformerForCausalLM(
        DiffTransformerConfig(
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
if arguments.data:
    data = Dataset.from_json(arguments.data)
else:
    pairs = [(a, b) for a in range(40) for b in range(40)]
    prompts, completions = [f"{a} + {b} =" for a, b in pairs], [f" {a + b}" for a, b in pairs]
    data = Dataset.from_dict({"prompt": prompts, "completion": completions})
data = data.train_test_split(test_size=0.1, seed=0)

trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        arguments.output,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,  # a step of 8 rows: its loss is the mean over all their completions' tokens
        packing=True,  # documents share a row and do not see each other
        max_length=arguments.length,
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
trainer.save_model()  # diff-transformer generate OUTPUT --prompt "2 + 3 ="
