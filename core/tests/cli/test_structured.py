"""The options for structured output."""

import json

import pytest

from specdec.sampling.structured import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}


def params_of(fake_engine):
    return fake_engine[0].calls[0][1].structured_outputs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--json-schema", json.dumps(SCHEMA)], {"json": SCHEMA}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "[a-c]+"], {"regex": "[a-c]+"}),
        (["--choice", "yes, sir", "--choice", "no"], {"choice": ["yes, sir", "no"]}),
        (["--grammar", 'root ::= "a"'], {"grammar": 'root ::= "a"'}),
        (["--structured-outputs", '{"regex": "a", "disable_any_whitespace": true}'],
         {"regex": "a", "disable_any_whitespace": True}),
    ],
)  # fmt: skip
def test_options_reach_the_engine(cli, fake_engine, options, expected):
    code, _, err = cli("generate", "--model", "m", "--max-tokens", "9", *options, "p")
    assert (code, err) == (0, "")
    assert params_of(fake_engine) == StructuredOutputsParams(**expected)


def test_schemas_and_grammars_from_files(cli, fake_engine, tmp_path):
    schema, grammar = tmp_path / "s.json", tmp_path / "g.ebnf"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('root ::= "a"')
    cli("generate", "--model", "m", "--json-schema", str(schema), "p")
    cli("generate", "--model", "m", "--grammar", str(grammar), "p")
    assert [e.calls[0][1].structured_outputs.spec().kind for e in fake_engine] == ["json", "grammar"]
    assert list(json.loads(fake_engine[0].calls[0][1].structured_outputs.spec().text)["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json-schema", "missing.json"], "--json-schema: 'missing.json' is neither a JSON object nor a file"),
        (["--json-schema", "{"], "--json-schema: the schema is not valid JSON"),
        (["--grammar", "missing"], "--grammar: 'missing' is neither a grammar (root ::= …) nor a file"),
        (["--structured-outputs", "3"], "--structured-outputs: '3' is not a JSON object"),
        (["--structured-outputs", '{"jsn": 1}'], "structured_outputs has no 'jsn'; it has json, json_object"),
        (["--regex", "a", "--choice", "b"], "structured_outputs has regex and choice; give exactly one of json,"),
    ],
)
def test_mistakes(cli, fake_engine, options, message):
    code, _, err = cli("generate", "--model", "m", *options, "p")
    assert code == 2
    assert message in err
    assert not fake_engine
