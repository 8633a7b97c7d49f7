"""Exact turns: a conversation's next prompt takes earlier answers with the tokens that they were made of.

A client sends an answer back as text. Encoded anew it often has other tokens than the model generated, and
then none of the conversation's pages from there on fit. So a worker records each answer's tokens under the
text of the whole conversation up to its end. The next prompt has the same text there, and gets these tokens.

    segments   cut a prompt at its stop tokens; keys; what fits where      (pure)
    record     a record as pages of the pool, and back; those at hand     (pure)
    shelf      records in the pool, each wait with a deadline
    exact      what happens to one prompt and to one answer

Knows no SGLang. May import: kvpool.client, `engine.metric_names`, errors.
"""
