"""A copy of this worker in the place of another.

`obstacles` are why it cannot be made, `fork` makes it, and `copier` does so when the launcher asks for it.
"""
