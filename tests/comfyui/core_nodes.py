"""ComfyUI's own nodes that patch a model and reach into it, on models of ours: asserted by the scripts that run inside
ComfyUI, which say how they load and sample theirs."""

import comfy.patcher_extension
import torch
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from comfy_extras.nodes_lumina2 import RenormCFG

STEPS = 8


def passes(patcher, sample):
    """(latent, how often the model's first block ran)"""
    count = []
    module = patcher.model.diffusion_model
    block = next(child for child in module.modules() if type(child).__name__ in module.repeated_blocks)
    hook = block.register_forward_pre_hook(lambda *_: count.append(1))
    try:
        return sample(patcher), len(count)
    finally:
        hook.remove()


def check_step_caches(load, sample):
    """load(): a model; sample(model): a latent after STEPS steps without guidance."""
    plain, every = passes(load(), sample)
    assert every == STEPS
    for node in (EasyCacheNode, LazyCacheNode):
        name = node.__name__
        unused, count = passes(node.execute(load(), 0.0, 0.1, 0.95, False).args[0], sample)
        assert torch.equal(unused, plain) and count == STEPS, name
        cached, count = passes(node.execute(load(), 1.0, 0.1, 0.95, False).args[0], sample)
        assert 2 <= count < STEPS, (name, count)
        difference = float((cached - plain).norm() / plain.norm())
        assert 0 < difference < 1.0, (name, count, difference)


def check_a_wrapper_may_write_into_its_input(load, sample):
    """EasyCache adds what it kept to the very tensor it was given."""

    def greedy(executor, x, *args, **kwargs):
        out = executor(x.clone(), *args, **kwargs)
        x.zero_()
        return out

    patched = load().clone()
    patched.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, greedy)
    assert torch.equal(sample(patched), sample(load()))


def check_renormalized_guidance(load, sample):
    """sample(model): with guidance. RenormCFG reads the number of channels off the diffusion model."""
    plain = sample(load())
    longest, none = (sample(RenormCFG.execute(load(), 100.0, limit).args[0]) for limit in (1.0, 0.0))
    assert torch.allclose(none, plain, rtol=1e-4, atol=1e-4)
    assert (longest - plain).norm() > 1e-3 * plain.norm() and longest.isfinite().all()
