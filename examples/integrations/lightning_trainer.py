"""Lightning's `Trainer.fit` that survives out-of-memory. `python examples/integrations/lightning_trainer.py`

`# new` marks what Brimful adds, `# before:` what it replaces. A simulated memory limit stands for the GPU: it drops at step 4,
as if another process had taken the memory, and returns at step 8.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import brimful  # for the simulated memory only
from brimful.integrations.lightning import exact  # new

VOCAB, PAD, STEPS = 128, 0, 16


class CharModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(VOCAB, 64), nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, VOCAB)

    def training_step(self, batch, batch_idx):
        logits, labels = self.head(self.gru(self.embed(batch[:, :-1]))[0]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
        self.log("loss", loss, on_step=True, on_epoch=True)
        # before: return loss
        return {"loss": loss, "count": (labels != PAD).sum()}  # new: the mean runs over tokens, not rows

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Gpu(L.Callback):
    """Stands for a GPU that other processes use too."""

    def __init__(self, memory):
        self.memory = memory

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.memory.limit_bytes = (10 if 4 <= trainer.global_step + 1 < 8 else 24) * 2**20

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print(f"step {trainer.global_step:2}: loss {outputs['loss']:.3f}, {len(batch)} rows")


def pad(rows):
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def main():
    torch.manual_seed(0)
    starts, lengths = torch.randint(1, 64, (STEPS * 64,)), torch.randint(4, 48, (STEPS * 64,))
    rows = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    loader = DataLoader(rows, batch_size=64, collate_fn=pad)

    with brimful.simulated_memory("24MiB") as memory:  # stands for the GPU
        trainer = exact(L.Trainer, grow_after=3)(  # before: trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            gradient_clip_val=1.0,
            callbacks=[Gpu(memory)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(CharModel(), loader)
    for event in trainer.exact_steps.stepper.events:
        print(f"step {event.step}, {event.event}: {event.sentence}")
    print(f"{trainer.global_step} of {STEPS} steps, {trainer.exact_steps.ooms} out-of-memory errors survived")


if __name__ == "__main__":
    main()
