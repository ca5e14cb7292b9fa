-- Find leftovers among candidates, and drop them.
-- KEYS  1 prefix
-- ARGV  1 remove 0|1  2 how long a node must have been silent, ms  3… kind and id of each candidate
-- Returns {kind, id, …} of those that are leftovers
--@use time
local out = {}

local function silent(node)
  local key = P .. 'node:' .. node
  local state = call('HGET', key, 'state')
  if state and (state ~= 'gone' or call('PTTL', key) > DAY - tonumber(A[2])) then return false end
  return call('EXISTS', P .. 'lease:' .. node, P .. 'places:' .. node, P .. 'inflight:' .. node) == 0
end

for i = 3, #A, 2 do
  local kind, id = A[i], A[i + 1]
  local keys
  if kind == 'lost' and call('HGET', P .. 'sandbox:' .. id, 'state') == 'lost' then
    keys = { P .. 'sandbox:' .. id }
  elseif kind == 'marks' and call('EXISTS', P .. 'sandbox:' .. id) == 0 then
    keys = { P .. 'agents:' .. id, P .. 'busy:' .. id }
  elseif kind == 'chunk' and call('EXISTS', P .. 'blob:' .. string.match(id, '^(.*):')) == 0 then
    keys = { P .. 'blob:' .. id }
  elseif kind == 'node' and silent(id) then
    keys = { P .. 'node:' .. id, P .. 'warm:' .. id, P .. 'stopping:' .. id }
  end
  if keys then
    out[#out + 1] = kind
    out[#out + 1] = id
    if A[1] == '1' then
      call('DEL', unpack(keys))
      if kind == 'node' then
        call('SREM', P .. 'nodes', id)
        call('DEL', 'sandfleet.node.' .. id)
      elseif kind ~= 'chunk' then
        call('ZREM', P .. 'sandboxes', id)
      end
    end
  end
end
return out
