"""Identity of full blocks: a chain of sha256 keys with the same meaning in every process, tier and peer.

    root       = sha256("quire.kv.namespace.v1" + fields)          model, revision, dtype, block size, geometry
    key[0]     = sha256(root     + tokens of block 0 + extras)     tokens: packed little-endian uint32
    key[i]     = sha256(key[i-1] + tokens of block i)              so a key names everything before it, too
    of a group = key[n] + the group's number (group 0: key[n])     n: the block of the chain with which its block ends
    extras     = sha256("quire.kv.extras.v1" + tagged values)      adapter, salt, tenant, embeddings; empty: none

Blocks of the chain have the size that divides the blocks of all groups. The block 0 of a group with twice as many
tokens ends with block 1 of the chain, and has its key. No two blocks of a group end there, so this names its tokens.

Every field of variable length has its length and its tag before it, so an adapter's name is never taken for a salt. The
block size is fixed within a namespace, so the three parts of a block's input have known borders.
Knows nothing of pools and requests.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from quire.contracts.blocks import KVGeometry

DIGEST_BYTES = 32
KEY_SIZES = DIGEST_BYTES, DIGEST_BYTES + 1  # bytes of a block's key in group 0, and in the others (`group_keys`)
_TOKEN_BYTES = 4
Tags = Sequence[tuple[str, str]]  # (domain, value) pairs, such as ("salt", "s-7")
TENANT = "tenant"  # the domain that separates tenants; they must not learn of each other


def namespace_digest(
    *, model: str, revision: str, dtype: str, block_size: int, geometry: KVGeometry, weights: str = ""
) -> bytes:
    """Return 32 bytes that are equal for two engines exactly when they can exchange blocks.

    model, revision   identity of the weights
    dtype             dtype of the computation, such as "bfloat16"
    weights           quantization of the weights; "": none
    geometry          KV layout of the whole model, not of one tensor-parallel or pipeline rank, with the cache's dtype.
                      Keys and values of layers behind recurrent ones depend on the types of states, too
    """
    fields = [("model", model), ("revision", revision), ("dtype", dtype), ("block_size", str(block_size))]
    if weights:
        fields.append(("weights", weights))
    for index, group in enumerate(geometry.groups):
        own = f" block={group.block_size}" * (group.block_size != block_size)
        own += f" entry={group.tokens_per_entry}" * (group.tokens_per_entry != 1)
        fields.append(("group", f"{index} window={group.window}{own} layers={','.join(map(str, group.layers))}"))
        for c in (*group.components, *group.drafts):
            fields += [("component", c.name), ("shape", f"{c.num_heads}x{c.head_dim}"), ("component_dtype", c.dtype)]
        fields += [("fewer", f"{layer} {count}") for layer, count in group.fewer]
    fields += [("state", f"{one.name} {one.dtype}") for group in geometry.states for one in group.components]
    return sha256(b"quire.kv.namespace.v1" + _pack(fields)).digest()


def extras_digest(tags: Tags) -> bytes:
    """Return a 32-byte hash of the tags, whatever their order; b"" when there are none."""
    if not tags:
        return b""
    return sha256(b"quire.kv.extras.v1" + _pack(sorted(tags))).digest()


def block_key(parent: bytes, token_bytes: bytes | memoryview, extras: bytes = b"") -> bytes:
    """Return the key of a full block.

    parent        key of the previous block; the root for the first block
    token_bytes   tokens of the block as packed little-endian uint32
    extras        `extras_digest` of the request's tags for the first block, b"" for later blocks
    """
    return sha256(b"".join((parent, token_bytes, extras))).digest()


def group_keys(chain: "KeyChain", group: int, size: int, stop: int, start: int = 0) -> list[bytes]:
    """Return the keys of the blocks [start, stop) of KV group number `group`, whose blocks have `size` tokens."""
    step = size // chain.block_size
    keys = chain.keys(stop, start) if step == 1 else chain.keys(stop * step, start * step)[step - 1 :: step]
    return [key + bytes((group,)) for key in keys] if group else keys


def group_of(key: bytes) -> int:
    """Return the number of the KV group of a block's key."""
    return key[DIGEST_BYTES] if len(key) > DIGEST_BYTES else 0


def _pack(fields: Iterable[tuple[str, str]]) -> bytes:
    packed = bytearray()
    for field in fields:
        for part in field:
            data = part.encode("utf-8", "surrogatepass")  # any str has a key: no salt may stop the engine
            packed += len(data).to_bytes(4, "little") + data
    return bytes(packed)


class KeyChain:
    """Keys of a request's full blocks. Each key is computed once, at its first use.

    root     key before the first block, a `namespace_digest`
    tokens   the request's own array('I') of prompt and generated ids; it may only grow
    tags     (domain, value) pairs such as ("salt", "s-7"); requests with different tags share no key
    private  number of a block and the name of a transfer: only chains with this name have the keys from this block on
    """

    __slots__ = ("block_size", "root", "tags", "tokens", "_extras", "_keys", "_private")

    def __init__(
        self,
        root: bytes,
        block_size: int,
        tokens: "array[int]",
        tags: Tags = (),
        private: tuple[int, str] | None = None,
    ) -> None:
        assert len(root) == DIGEST_BYTES and block_size > 0, "a chain starts at a namespace digest"
        assert tokens.typecode == "I" and tokens.itemsize == _TOKEN_BYTES, "token ids are stored as array('I')"
        assert sys.byteorder == "little", "keys are defined over little-endian token ids"
        self.block_size, self.root = block_size, root
        self.tokens = tokens
        self.tags = tags
        self._extras = extras_digest(tags)
        self._private = private
        self._keys: list[bytes] = []

    @property
    def num_hashed(self) -> int:
        """Number of keys computed so far."""
        return len(self._keys)

    def continues(self, block: int) -> bytes | None:
        """Return the bytes that a block's key hashes before its tokens: the previous key; for block 0, root and extras.
        None: the previous block has no key yet.
        """
        if block == 0:
            return self.root + self._extras
        return self._keys[block - 1] if block <= len(self._keys) else None

    def keys(self, stop: int, start: int = 0) -> list[bytes]:
        """Return the keys of the full blocks [start, stop)."""
        if stop > len(self._keys):
            self._hash_up_to(stop)
        return self._keys[start:stop]

    def _hash_up_to(self, stop: int) -> None:
        """Compute the keys of the blocks up to `stop`. The first private block has the secret in its key."""
        first, name = self._private or (stop, "")
        if len(self._keys) <= first < stop:
            if first:
                self._hash_run(first)
            tokens = self.tokens[first * self.block_size : (first + 1) * self.block_size].tobytes()
            secret = extras_digest([("transfer", name)])
            parent = self._keys[-1] if self._keys else self.root
            self._keys.append(block_key(parent, tokens, self._extras + secret))
        self._hash_run(stop)

    def _hash_run(self, stop: int) -> None:
        keys, size = self._keys, self.block_size
        assert stop * size <= len(self.tokens), f"block {stop - 1} is not full: {len(self.tokens)} tokens of {size}"
        if not keys:
            keys.append(block_key(self.root, self.tokens[:size].tobytes(), self._extras))
        parent, step = keys[-1], size * _TOKEN_BYTES
        data = self.tokens[len(keys) * size : stop * size].tobytes()
        for at in range(0, len(data), step):  # block_key inlined: this is the loop over a long prompt
            parent = sha256(parent + data[at : at + step]).digest()
            keys.append(parent)
