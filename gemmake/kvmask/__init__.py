"""The template of a sparse KV cache: what every KV head keeps, found by measurement.

stage.py      the step of a compile: texts, template, what is written about it
mix/, texts.py, heldout.py    what is measured on: generated, or the user's own
losses.py     what heads would lose, by the engine
choose.py     the order in which they keep less
gates.py      quality on held-out text; quality.py: its figures
chat.py, reader.py            texts as the device reads them
template.py   all of it together
values.py     which heads hold values or keys of 4 bits: the step, and what is written about it
saved.py      losses on the way, for a compile that is stopped
"""
