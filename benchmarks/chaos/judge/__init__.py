"""From the records of a chaos run to its figures.

May import: pages and records of the chaos run. It reads no clock and no file.
"""
