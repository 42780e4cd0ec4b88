"""trajectories: what dumps of trajectories say, chosen, found and prepared for a page.

`sample_of_run` chooses what the report holds; `TrajectoryLibrary` has all. Templates get `GroupView`s.
"""
