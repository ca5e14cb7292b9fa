-- The byte budget: zset `blobs` of "size|client||id" by expiry, hash `bytes` of totals.
local function give_back(member)
  local size, client = split(member)
  call('ZREM', P .. 'blobs', member)
  for _, field in ipairs({ 'total', 'client:' .. client }) do
    if call('HINCRBY', P .. 'bytes', field, -size) <= 0 then call('HDEL', P .. 'bytes', field) end
  end
end
