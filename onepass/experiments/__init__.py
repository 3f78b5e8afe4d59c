"""The paper's experiments: its data sets, models and methods. Needs ``pip install 'onepass[experiments]'``."""
