"""What keeps a program in: namespaces, Landlock, filters of system calls, users, control groups, and its directory.

`confine` puts them together, by level.
"""
