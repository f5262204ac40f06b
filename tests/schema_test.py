"""Documents that the grammars of random JSON schemas let through are valid for Python's jsonschema too.

    python3 tests/schema_test.py TEST_TEXT_GRAMMAR [unittest options]
"""
import decimal
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import jsonschema
except ImportError:
    jsonschema = None

PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 else ""


def is_multiple(validator, of, value, schema):
    """multipleOf of decimal fractions exactly: the package divides doubles, for which 0.07 is no multiple of 0.01."""
    if isinstance(value, (int, float, decimal.Decimal)) and not isinstance(value, bool) and decimal.Decimal(str(value)) % decimal.Decimal(str(of)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {of}")


@unittest.skipIf(jsonschema is None, "no Python package jsonschema")
class Documents(unittest.TestCase):
    def test_documents_of_a_schemas_grammar_are_valid(self):
        validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, dict(multipleOf=is_multiple))
        count = 0
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "documents.jsonl"
            subprocess.run([PROGRAM, "--gtest_filter=*random_schemas*"], env=os.environ | dict(INGOT_SCHEMA_DOCUMENTS=str(path)), check=True, stdout=subprocess.DEVNULL)
            for line in path.read_text().split("\n")[:-1]:
                case = json.loads(line)
                validator(case["schema"], format_checker=validator.FORMAT_CHECKER).validate(json.loads(case["document"]))
                count += 1
        self.assertGreater(count, 1000)


if __name__ == "__main__":
    unittest.main()
