"""The Trainer of Transformers on a small GPT-2 with random weights: training, evaluation, a checkpoint."""

import math
import tempfile

import torch
import torch.distributed as dist
from outcome import backend_of, tell
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.tokens = torch.randint(0, 100, (count, 32), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=8,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            seed=3,
            report_to=[],
            disable_tqdm=True,
        )
        set_seed(3)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2))
        trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(128), eval_dataset=Sentences(24))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(losses) == 8 and len(evaluated) == 2 and all(map(math.isfinite, losses + evaluated))
        rank, world = dist.get_rank(), dist.get_world_size()
        tell(rank, by=backend_of(), world=world, **({"losses": losses, "evaluated": evaluated} if rank == 0 else {}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
