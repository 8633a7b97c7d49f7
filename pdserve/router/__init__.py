"""Router: one OpenAI endpoint in front of prefill and decode workers.

Each folder imports only folders below it: `cli`, `processes`, `admin`, `app`, `dispatch` and `admission`,
`request`, `placement`, `fleet`, then `server`, `upstream`, `sessions` and `tenants`, then `api`, `config`,
`metrics`. Workers are reached over HTTP only.
"""
