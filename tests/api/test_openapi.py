"""The OpenAPI document is valid, and matches the router."""

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from api import openapi


def test_the_document_is_valid_openapi():
    OpenAPIV31SpecValidator(openapi.document("0")).validate()


@pytest.mark.parametrize("record", openapi.REQUESTS)
def test_every_field_of_a_request_is_described(record):
    properties = openapi.document("0")["components"]["schemas"][record.__name__]["properties"]
    assert set(properties) == set(record.__struct_fields__)
    assert all(field["description"] for field in properties.values())


def test_the_document_has_the_required_role_of_each_operation():
    paths = openapi.document("0")["paths"]
    assert paths["/cluster"]["get"]["security"][0] == {"operator_key": []}
    assert paths["/health"]["get"]["security"] == []
    assert "401" in paths["/v1/completions"]["post"]["responses"]


async def test_every_operation_of_the_document_exists(api):
    reported = msgspec.json.decode((await api.get("/openapi.json")).body)
    for path, methods in reported["paths"].items():
        at = path.format(**dict.fromkeys(("model", "id"), "x"))
        for method in methods.keys() - {"parameters"}:
            answer = await (api.post(at) if method == "post" else api.get(at))
            assert answer.status not in (405, 501), (method, path)
            assert b"no such path" not in answer.body, (method, path)
