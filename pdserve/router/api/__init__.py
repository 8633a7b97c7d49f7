"""What clients may ask and what they get: endpoints, request bodies, errors, the OpenAPI document.

May import: nothing of the router.
"""
