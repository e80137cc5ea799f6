"""How tokens are chosen: sampling parameters, distributions, penalties, log probabilities, acceptance of drafts."""
