# ruff: noqa: E501 - a table of source pieces
"""Change the kernels' arithmetic in small ways and see that the tests notice every one.

python -m tests.kernels.mutants [WORD ...]      only mutants whose name or file has a WORD
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before triton
os.environ["OMP_NUM_THREADS"] = (
    "1"  # before torch: tiny tensors, and threads that wait for one another
)

import triton.language  # noqa: F401 - what every fork would import again

from tests.mutation import Mutant, hunt

TESTS = {
    "rows.py": ["kernels/test_logp.py", "kernels/test_linear_logp.py"],
    "logp.py": ["kernels/test_logp.py"],
    "linear_logp.py": ["kernels/test_linear_logp.py"],
    "grpo_loss.py": ["kernels/test_grpo_loss.py", "kernels/test_masked_grpo.py"],
    "grpo_reference.py": ["kernels/test_grpo_loss.py", "kernels/test_masked_grpo.py"],
    "reduce.py": ["kernels/test_reduce.py"],
    "masked_grpo.py": ["kernels/test_masked_grpo.py"],
    "liger.py": ["kernels/test_masked_grpo.py"],
    "objective.py": ["kernels/test_grpo_loss.py"],
}

MUTANTS = [
    # the Triton forward
    Mutant("rows.py", "every = every * decay", "every = every"),
    Mutant("rows.py", "others = every  #", "others = others * decay  #"),
    Mutant("rows.py", "(weighted + every * shift) * decay", "weighted * decay"),
    Mutant("rows.py", "(peak - new_peak) * scale", "(peak - new_peak)"),
    Mutant("rows.py", "tl.where(x == new_peak, 0.0, e)", "e"),
    Mutant("rows.py", ", -150.0, propagate_nan=tl.PropagateNan.ALL)", ", -1e30)"),
    Mutant("rows.py", ", -150.0, propagate_nan=tl.PropagateNan.ALL)", ", -150.0)"),
    Mutant("rows.py", "(num_peaks - 1.0)", "0.0"),
    Mutant("rows.py", "-0.6931471805599453", "-1.0"),
    Mutant("rows.py", 'tl.where(v < V, x, float("-inf"))', "x"),
    Mutant("rows.py", "whole = V // BLOCK_V * BLOCK_V", "whole = V - BLOCK_V"),
    Mutant("rows.py", "if tl.load(mask + t) == 0:", "if tl.load(mask + t) == 7:"),
    Mutant("rows.py", "if tl.load(mask + t) == 0:", "if tl.load(mask + t) == 7:", 1),
    Mutant("rows.py", "(t // num_cols) * stride_b + (t % num_cols) * stride_l", "t * stride_l"),
    Mutant("rows.py", "(t // num_cols) * stride_b + (t % num_cols) * stride_l", "t * stride_l", 2),
    Mutant("rows.py", "(t // num_cols) * out_b + (t % num_cols) * out_l", "t * out_l"),
    Mutant("rows.py", "v * stride_v", "v"),
    Mutant("rows.py", "t = tl.program_id(0).to(tl.int64)", "t = tl.program_id(0)"),
    Mutant("rows.py", "t = tl.program_id(0).to(tl.int64)", "t = tl.program_id(0)", 1),
    Mutant("rows.py", "softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)", "x"),
    # the Triton backward
    Mutant("rows.py", "-inv_temperature * p * grad", "-p * grad"),
    Mutant("rows.py", "grad_entropy * (gap + mean_gap)", "grad_entropy * gap"),
    Mutant("rows.py", "p = tl.exp(gap - log_mass)", "p = tl.exp(gap)"),
    Mutant("rows.py", "1.0 - (x / softcap) * (x / softcap)", "1.0"),
    Mutant("rows.py", "mask=v < V)\n            return", "mask=v < 0)\n            return"),
    # the torch passes
    Mutant("rows.py", 'torch.where(is_peak_N, float("-inf"), wanted_N)', "wanted_N"),
    Mutant("rows.py", "is_peak_N.to(rest.dtype)) - 1", "is_peak_N.to(rest.dtype))"),
    Mutant("rows.py", "y.clamp_(min=-750.0).mul_(e)", "y.mul_(e)"),
    Mutant("rows.py", "-weighted / (1 + rest)", "-weighted"),
    Mutant("rows.py", "y.mul_(inv_temperature)", "y.mul_(1.0)"),
    Mutant("rows.py", "e.log().clamp_(min=-750.0)", "e.log()"),
    Mutant("rows.py", "-inv_temperature * torch.exp(-stats.log_mass)", "-torch.exp(-stats.log_mass)"),
    Mutant("rows.py", "gap + stats.mean_gap[tile, None]", "gap"),
    Mutant("rows.py", "1 - (x / softcap).square_()", "1"),
    # the target's share
    Mutant("rows.py", "grad * -torch.expm1(logp)", "grad * (1 - p)"),
    Mutant("rows.py", "- (row_grad - grad) * p", ""),
    Mutant("rows.py", "out - grad_entropy * p * (gap + stats.mean_gap)", "out"),
    Mutant("rows.py", "1 - ((stats.peak + gap / inv_temperature) / softcap).square()", "1"),
    Mutant("rows.py", "return out * inv_temperature", "return out"),
    Mutant("rows.py", ") * inv_temperature - stats.log_mass[row_N]", ") - stats.log_mass[row_N]"),
    Mutant("rows.py", "return self.log_mass + self.mean_gap", "return self.log_mass"),
    Mutant("rows.py", "tanh_().mul_(softcap)", "tanh_()"),
    # from given logits
    Mutant("logp.py", "out[_at(out, rows, target_T[rows])] = at_target.to(out.dtype)", "pass"),
    Mutant("logp.py", "out[_at(out, (~mask_T).nonzero().squeeze(1))] = 0", "pass"),
    Mutant("logp.py", "out = logits if ctx.inplace else torch.empty_like(logits)", "out = logits"),
    Mutant("logp.py", "rows = mask_T.nonzero().squeeze(1)", "rows = rows"),
    Mutant("logp.py", "rows // logits.shape[1], rows % logits.shape[1]", "rows % logits.shape[0], rows // logits.shape[0]"),
    # the LM head
    Mutant("linear_logp.py", "rows_N[1:] > rows_N[:-1]", "rows_N[1:] >= rows_N[:-1]"),
    Mutant("linear_logp.py", "rows_N[1:] > rows_N[:-1]", "rows_N[1:] != rows_N[:-1]"),
    Mutant("linear_logp.py", "targets_N.contiguous()", "targets_N"),
    Mutant("linear_logp.py", "keys // vocab, keys % vocab", "keys % vocab, keys // vocab"),
    Mutant("linear_logp.py", "kept, ctx.kept = ctx.kept, None", "kept = ctx.kept"),
    Mutant("linear_logp.py", "row_P - rows.start, target_P)\n        grad_entropy", "row_P, target_P)\n        grad_entropy"),
    Mutant("linear_logp.py", "d[row_P - rows.start, target_P]", "d[row_P, target_P]"),
    Mutant("linear_logp.py", "RowStats(*(x[rows] for x in stats)), grad_U[rows]", "RowStats(*(x[rows] for x in stats)), grad_U[:len(here)]"),
    Mutant("linear_logp.py", "out += self.bias", "pass"),
    Mutant("linear_logp.py", "ctx.kept = buffer if keep and len(chunks) == 1 else None", "ctx.kept = None"),
    Mutant("linear_logp.py", "ctx.kept = buffer if keep and len(chunks) == 1 else None", "ctx.kept = buffer"),
    Mutant("linear_logp.py", "hidden_UH = hidden_TH[terms.rows_U]", "hidden_UH = hidden_TH[terms.rows_U.flip(0)]"),
    Mutant("linear_logp.py", "hidden_UH.new_zeros(ctx.shape)", "hidden_UH.new_empty(ctx.shape).fill_(1)"),
    Mutant("linear_logp.py", "part if grad_bias is None else grad_bias + part", "part"),
    Mutant("linear_logp.py", "if wants_weight:", "if True:"),
    # the fused objective
    Mutant("grpo_loss.py", "_within(x, -20.0, 20.0)", "_within(x, -200.0, 200.0)"),
    Mutant("grpo_loss.py", "x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)", "x = tl.maximum(x, low)"),
    Mutant("grpo_loss.py", "return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)", "return tl.minimum(x, high)"),
    Mutant("grpo_loss.py", "bounded * adv, propagate_nan=tl.PropagateNan.ALL)", "bounded * adv)"),
    Mutant("grpo_loss.py", "tl.minimum(ratio, clip_high, propagate_nan=tl.PropagateNan.ALL)", "tl.minimum(ratio, clip_high)"),
    Mutant("grpo_loss.py", "tl.where(x == clamped, e, 0.0)", "e"),
    Mutant("grpo_loss.py", "tl.where(ratio <= delta, ratio_slope, 0.0)", "ratio_slope"),
    Mutant("grpo_loss.py", "free = tl.minimum(ratio, delta)", "free = ratio"),
    Mutant("grpo_loss.py", "_within(ratio, clip_low, clip_high)", "tl.minimum(ratio, clip_high)"),
    Mutant("grpo_loss.py", "_within(ratio, clip_low, clip_high)", "tl.maximum(ratio, clip_low)"),
    Mutant("grpo_loss.py", "tl.where(ratio == bounded, ratio_slope, 0.0)", "0.0 * ratio"),
    Mutant("grpo_loss.py", "-tl.minimum(free * adv, bounded * adv, propagate_nan=tl.PropagateNan.ALL)", "-free * adv"),
    Mutant("grpo_loss.py", "free * adv <= bounded * adv", "free <= bounded"),
    Mutant("grpo_loss.py", "(adv < 0) & (policy > -clip_ratio_c * adv)", "policy > -clip_ratio_c * adv"),
    Mutant("grpo_loss.py", "slope = tl.where(too_much, 0.0, slope)", "slope = slope"),
    Mutant("grpo_loss.py", "slope = -tl.minimum(ratio, clip_high, propagate_nan=tl.PropagateNan.ALL) * adv", "slope = -ratio * adv"),
    Mutant("grpo_loss.py", "policy = slope * lp", "policy = slope"),
    Mutant("grpo_loss.py", "tl.where(adv > 0, tau_pos, tau_neg)", "tau_pos"),
    Mutant("grpo_loss.py", "gate * (1.0 - gate) * adv * ratio_slope", "gate * (1.0 - gate) * adv"),
    Mutant("grpo_loss.py", "slope *= f", "pass"),
    Mutant("grpo_loss.py", "policy *= f", "pass"),
    Mutant("grpo_loss.py", "kl, kl_slope = -clamped, unclamped", "kl, kl_slope = -clamped, -unclamped"),
    Mutant("grpo_loss.py", "0.5 * clamped * clamped, -clamped * unclamped", "clamped * clamped, -clamped * unclamped"),
    Mutant("grpo_loss.py", "e - clamped - 1.0, unclamped - e_slope", "e - clamped - 1.0, e_slope - unclamped"),
    Mutant("grpo_loss.py", "kl_slope * ratio + kl * ratio_slope", "kl_slope * ratio"),
    Mutant("grpo_loss.py", "kl *= ratio", "pass"),
    Mutant("grpo_loss.py", "slope += beta * kl_slope", "slope += kl_slope"),
    Mutant("grpo_loss.py", "tl.store(slope_out + n, w * slope", "tl.store(slope_out + n, slope"),
    Mutant("grpo_loss.py", "(ratio < clip_low) & (adv < 0)", "(ratio < clip_low)"),
    Mutant("grpo_loss.py", "(ratio > clip_high) & (adv > 0)", "(ratio > clip_high)"),
    Mutant("grpo_loss.py", "tl.where(keep, ratio - 1.0 - log_ratio, 0.0)", "tl.where(keep, log_ratio, 0.0)"),
    Mutant("grpo_loss.py", "tl.max(tl.where(keep, ratio, 0.0))", "tl.sum(tl.where(keep, ratio, 0.0))"),
    Mutant("grpo_loss.py", "return slope * grad, None, None, None", "return slope, None, None, None"),
    Mutant("grpo_loss.py", "bonus = bonus * factors.high_entropy", "pass"),
    Mutant("grpo_loss.py", "torch.where(mask_N, x if", "torch.where(mask_N | True, x if"),
    Mutant("grpo_loss.py", "torch.where(mask_N, sequence_N, 0)", "sequence_N"),
    Mutant("grpo_loss.py", "mask_N = mask_N.contiguous()", "pass"),
    # the reference
    Mutant("grpo_reference.py", "torch.where(self.mask, x, 0.0))[self.sequence]", "x)[self.sequence]"),
    Mutant("grpo_reference.py", ".clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", ""),
    Mutant("grpo_reference.py", "mean = mean.detach() + batch.logp - batch.logp.detach()", "mean = mean"),
    Mutant("grpo_reference.py", "ratio.detach().clamp(max=objective.clip_high)", "ratio.clamp(max=objective.clip_high)"),
    Mutant("grpo_reference.py", "* 4 / tau * adv", "* 4 * adv"),
    Mutant("grpo_reference.py", "adv > 0, log_ratio.clamp(max", "adv >= 9, log_ratio.clamp(max"),
    Mutant("grpo_reference.py", "ratio.clamp(max=objective.delta)", "ratio"),
    Mutant("grpo_reference.py", "torch.where(adv < 0, torch.minimum(loss,", "torch.where(adv < 9, torch.minimum(loss,"),
    Mutant("grpo_reference.py", "correction.log().clamp(_LOG_1E_8, MAX_LOG_RATIO)", "correction"),
    Mutant("grpo_reference.py", "(lam + k * log_w - lam * log_w.exp()).exp()", "(k * log_w - lam * log_w.exp()).exp()"),
    Mutant("grpo_reference.py", 'gap.square() / 2', 'gap.square()'),
    Mutant("grpo_reference.py", "kl * ratio if objective.use_bias_correction_kl else kl", "kl"),
    Mutant("grpo_reference.py", "torch.where(gap.isfinite(), gap, 0.0)", "gap"),
    Mutant("grpo_reference.py", "torch.where(gap.isfinite(), gap, 0.0)", "gap", 1),
    Mutant("grpo_reference.py", "return ratio.clamp(low, high)", "return ratio.clamp(max=high)"),
    Mutant("grpo_reference.py", "(ratio >= low) & (ratio <= high)", "ratio <= high"),
    Mutant("grpo_reference.py", "(batch.advantage >= 0) | (drift <= threshold)", "drift <= threshold"),
    Mutant("grpo_reference.py", 'None if objective.loss_type == "gmpo" else self.high_entropy', "self.high_entropy"),
    Mutant("grpo_reference.py", 'None if objective.loss_type == "vespo" else self.correction', "self.correction"),
    Mutant("grpo_reference.py", "batch.sequence_mean(one_sided, factors.high_entropy)", "batch.sequence_mean(one_sided)"),
    Mutant("grpo_reference.py", "batch.mask.sum().clamp(min=1)", "len(x)"),
    # around it
    Mutant("reduce.py", "length_S[sequence_N].clamp(min=1) * num_sequences", "length_S[sequence_N].clamp(min=1)"),
    Mutant("reduce.py", "counted / counted.sum().clamp(min=1)", "counted / len(counted)"),
    Mutant("reduce.py", 'max(values)', 'sum(values)'),
    Mutant("reduce.py", 'part[key] * part["num_tokens"]', "part[key]"),
    Mutant("masked_grpo.py", "logp_N.detach() if old_logp_N is None else old_logp_N", "logp_N.detach()"),
    Mutant("masked_grpo.py", "temperature=temperature, softcap=softcap,", "softcap=softcap,"),
    Mutant("masked_grpo.py", "if weight_N is None:", "if True:"),
    Mutant("liger.py", "advantage = advantage * is_ratio", "pass"),
    Mutant("liger.py", "old - is_ratio.clamp(min=1e-8).log()", "old + is_ratio.clamp(min=1e-8).log()"),
    Mutant("objective.py", "not 0 <= smallest <= highest", "not smallest <= highest"),
    Mutant("objective.py", '_above("vllm_importance_sampling_clip_max", largest, 0.0)', "pass"),
    Mutant("objective.py", '"entropy_coef", "off_policy_mask_threshold"', '"entropy_coef"'),
    Mutant("objective.py", '0.4 if self.loss_type == "gmpo" else 0.2', "0.2"),
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(hunt(MUTANTS, "kernels", TESTS, sys.argv[1:]))
