"""The vocabulary of kvferry: the words every other folder speaks in.

Nothing in this package imports the code folders, except ``kvferry.cli``, which is the top of the import order.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
