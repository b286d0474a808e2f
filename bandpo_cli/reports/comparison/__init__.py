"""Reports that compare the variants of a sweep, or of any runs, over seeds. All input is read from run folders.

Nothing is imported here: `selection` needs no pandas, which the other modules import.
"""
