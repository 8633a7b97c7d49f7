"""What a request's body may hold, judged before anything is computed: by field a type, a range, the meaning
of null and of empty values, and whether this engine can do it. Pure; the one place for all endpoints.

`values` has the rules, `sampling` the fields that reach SGLang's sampler, `grammars` the bounds of schemas
and expressions, `conversations` the messages, `endpoints` the table of each path.
"""
