"""`brimful data …`: from files of rows to a token store, one file per command."""

from cyclopts import App

from brimful.cli.data.check import check
from brimful.cli.data.clean import clean
from brimful.cli.data.pack import pack
from brimful.cli.data.tokenizer import tokenizer

data = App(name="data", help="Rows in, token store out: check, clean, train a tokenizer, pack.")
for command in (check, clean, tokenizer, pack):
    data.command(command)
