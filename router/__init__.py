"""Choosing: which nodes there are, which two serve a request, and the HTTP front that speaks OpenAI's API to clients."""
