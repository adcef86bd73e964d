"""`ullage tune`: block size, cache type and per-layer precision, advised from measurements.

`lengths` works out what block sizes waste on recorded lengths, `quality` compares predictions, `measure` asks engines
for them through their public API, `advice` puts both together, `command` is the command line.
"""
