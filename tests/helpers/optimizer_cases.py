"""Small nets with the parameter names of a real model, and every optimizer of `stoker.trainer.optim`.

Has few imports, since child processes of tests import it.
"""

import torch
from torch import nn

from stoker.trainer.optim.adafactor import Adafactor
from stoker.trainer.optim.adamw import AdamW
from stoker.trainer.optim.muon import Muon
from stoker.trainer.optim.sgd import SGD

WIDTH = 12


class Net(nn.Module):
    """Net with the parameter names of a real model: embedding, tall and wide matrix, norm, head."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)

    def forward(self, ids):
        hidden = self.token_embedding(ids)
        return self.head(hidden + self.down(torch.tanh(self.up(self.norm(hidden)))))


class WideNet(Net):
    """Net with weights of several thousand elements: an embedding and a hidden matrix."""

    def __init__(self):
        super().__init__()
        self.table_embedding = nn.Embedding(500, 12)
        self.wide = nn.Linear(12, 420, bias=False)
        self.narrow = nn.Linear(420, 12)

    def forward(self, ids):
        return super().forward(ids) + self.head(
            self.narrow(torch.tanh(self.wide(self.table_embedding(ids * 70 + ids))))
        )


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(7, (2, 11), generator=generator)
    nn.functional.cross_entropy(model(ids[0]).float(), ids[1]).backward()


def optimizer_factories():
    """Yield (name, factory) of each optimizer with all the state it can have."""
    yield "adamw", lambda p, **k: AdamW(p, lr=1e-2, weight_decay=0.1, **k)
    yield "scaled", lambda p, **k: AdamW(p, lr=1e-1, scale_parameter=True, fused={"up.weight": (8, 12)}, **k)
    yield "sgd", lambda p, **k: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, **k)
    yield "adafactor", lambda p, **k: Adafactor(p, lr=1e-2, beta1=0.9, weight_decay=0.1, **k)
    yield "muon", lambda p, **k: Muon(p, lr=1e-2, weight_decay=0.1, fused={"up.weight": (8, 12)}, **k)


OPTIMIZER_FACTORIES = dict(optimizer_factories())
