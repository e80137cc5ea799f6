"""For tests of passes, here and in other packages: small graphs, inputs for them, and comparison of two graphs.

before = decoder(bias=True)
after = apply(MyPass(enabled=True), before).graph  # qcompile.passes.base
assert equivalent(after, before, sequence_inputs()) < 1e-14
"""

from qcompile.check import equivalent as equivalent
from qcompile.testing.graphs import Begun as Begun
from qcompile.testing.graphs import decoder as decoder
from qcompile.testing.graphs import sequence_inputs as sequence_inputs
