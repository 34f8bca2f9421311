"""The tables, claims and records of the repository, read once for all tests that look at them."""

from reproduce.claims import read_claims
from reproduce.records import Records
from reproduce.tables import read_tables
from tests.conftest import RUNS

TABLES = read_tables()
PAPERS = read_claims()
RECORDS = Records(RUNS)
