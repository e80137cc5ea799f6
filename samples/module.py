"""Compile an nn.Module of your own, which comes from no library.

python samples/module.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcompile

VOCAB, WIDTH, HEADS, CONTEXT = 256, 64, 4, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.before(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS).transpose(1, 3)
        q, k, v = heads.unbind(2)  # [batch, heads, tokens, head size] each
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(token_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = Decoder().eval()
ids = torch.randint(VOCAB, (1, 16))
places = torch.arange(16)[None]
qcompile.build(model, "out/module", recipe="f32", example_inputs=(ids, places), max_position=CONTEXT)

with qcompile.load("out/module") as llm:
    error = (llm.logits(ids) - model(ids, places)).abs().max()
    print(f"largest difference to the module's own logits: {error:.1e}")
    print(llm.generate(ids[0].tolist(), max_tokens=8, temperature=0)[0].outputs[0].token_ids)
