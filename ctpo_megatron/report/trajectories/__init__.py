"""trajectories: what dumps of trajectories say, chosen and prepared for a page.

`sample_of_run` chooses what the report holds, `matching` what passes filters. Templates get `GroupView`s.
"""
