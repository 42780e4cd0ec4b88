"""Makes a prompt file from a raw collection of problems: cleaned, deduplicated and checked against evaluation files.

`python -m examples.prepare_data RAW --output FILE` writes what `data.train` and `data.eval` take (docs/data.md), and
beside it a report with every dropped row.
"""
