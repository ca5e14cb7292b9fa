-- Push an agent's holds.
-- KEYS  1 prefix
-- ARGV  1 agent  2 ttl ms  3… sandbox ids (a page)
-- Returns those that are not live any more or not held by the agent.
--@use time
local ms, ttl = now_ms(), tonumber(A[2])
local gone = {}
for i = 3, #A do
  local agents = P .. 'agents:' .. A[i]
  local held = tonumber(call('ZSCORE', agents, A[1]) or 0)
  if held > ms and call('HGET', P .. 'sandbox:' .. A[i], 'state') == 'live' then
    call('ZADD', agents, ms + ttl, A[1])
    keep(agents, math.max(ttl, 2 * DAY))
  else
    gone[#gone + 1] = A[i]
  end
end
return gone
