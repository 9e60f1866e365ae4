import torch


def linear_logp(hidden, weight, rows, targets, *, temperature=1.0):
    u, inv = torch.unique(rows, return_inverse=True)
    lp = torch.log_softmax((hidden[u] @ weight.T).float() / temperature, -1)
    ent = -(lp.detach().exp() * lp.detach()).sum(-1)
    return lp[inv].gather(1, targets[:, None])[:, 0], ent[inv]


def grpo_loss(logp, old, adv, w, *, sampler_logp, epsilon, epsilon_high, mismatch_cap):
    tis = (old - sampler_logp).exp()
    if mismatch_cap:
        tis = tis.clamp(max=mismatch_cap)
    r = (logp - old).exp()
    l = -torch.minimum(r * adv, r.clamp(1 - epsilon, 1 + epsilon_high) * adv) * tis
    return (w * l).sum(), {}
