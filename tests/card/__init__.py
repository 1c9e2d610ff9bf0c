"""One run that shows what a graphics card does for EdgeSpec: python -m tests.card

It needs no network: it builds llama.cpp for the card's own architecture from sources that are there, makes
its models, compares texts with the processor's, measures the link, and times passes for each place of the
weights, beside llama.cpp's own ways. Where there is no card, a worker on the loopback stands in for one, with
smaller models, so that everything but the speed can be tried anywhere.
"""
