"""What runs in the processes of programs: the template, its workers, and the child that becomes a program.

Each fork copies pages of what is imported here, so this imports neither the client nor the server.
"""
